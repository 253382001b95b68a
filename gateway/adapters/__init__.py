"""Names of LoRA adapters: the digest and model of each, and who may change them.

Names end at the gateway: validation replaces a request's adapter name by its digest, whatever the name means later.

Open name_table.py first.
"""
