"""Map of tensor parallelism inside of a worker.

rank_processes    the other ranks, seen by rank 0
ranked_backend    rank 0's backend
rank_main         the process of a rank above 0
rank_messages     what they tell each other
rank_adapters     how an adapter gets to all of them
"""
