"""Kernels of mixtures of experts: the router, ordered pairs of rows and experts, and weighted sums.

    expert_routing.py    the router's product, scores and the best experts of each row, in one launch
    pair_sorting.py      pairs of a row and one of its experts, sorted by expert, and cut into tiles
    expert_adapters.py   what adapters of the rows add to these products (LoRA)
    grouped_product.py   products of rows by their experts' matrices, with the activation between the two
    expert_sums.py       each row's sum over its experts' results

Grids follow the number of rows alone, so that a CUDA graph runs any step of its size. Rows that pad a step, and pairs
of another process, have expert -1, which no kernel reads.
"""
