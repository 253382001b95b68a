"""Turns text into token ids and back. Open answer_text.py first.

No request and no component is known here.
"""
