"""Encoders (BERT, RoBERTa, XLM-RoBERTa, ModernBERT): vectors and labels of whole texts, without a cache.

Start with encoder.py. A text is computed alone, so its vector has the same bits in any batch.
"""
