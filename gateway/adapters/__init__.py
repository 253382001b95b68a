"""Keeps the names of LoRA adapters: which digest each means, for which model, and who may change that.

Behind the gateway nobody knows names: a request's name becomes the digest of its adapter when it is checked, and keeps
it whatever the name means later.

Open name_table.py first.
"""
