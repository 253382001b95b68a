"""Serves encoders (BERT, RoBERTa, XLM-RoBERTa, ModernBERT): vectors and labels of whole texts, without any cache.

    encoder_parser.py   ``config.json`` -> ModelConfig with an EncoderConfig
    encoder_weights.py  the tensors of a checkpoint by their names, checked
    encoder.py          the forward pass of one text on torch, and a classifier's head
    encoder_backend.py  the backend: a step's texts, one after the other

Open encoder.py first. A text is computed by itself, so its vector has the same bits whatever is beside it.
"""
