"""Kernels of mixtures of experts: the router, ordered pairs of rows and experts, and weighted sums.

    expert_routing.py    the router's product, scores and the best experts of each row, in one launch
    pair_sorting.py      pairs of a row and one of its experts, sorted by expert, and cut into tiles
    expert_adapters.py   contributions of the rows' adapters (LoRA) to the experts' products
    grouped_product.py   products of rows by their experts' matrices, with the activation between the two
    expert_sums.py       each row's sum over its experts' results

Grids depend on the number of rows alone, so that a CUDA graph serves any step of its size. Padding rows, and pairs of
experts of other processes, have expert -1, which kernels skip.
"""
