"""Serves encoders (BERT, RoBERTa, XLM-RoBERTa, ModernBERT): vectors and labels of whole texts, without any cache.

Open encoder.py first. A text is computed by itself, so its vector has the same bits whatever is beside it.
"""
