"""Conversion of text to token ids and back. Open answer_text.py first.

Nothing here depends on requests or components.
"""
