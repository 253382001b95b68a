"""Turns text into token ids and back. Open answer_text.py first.

answer_text.py       sampled tokens to visible text: detokenizer, stop ids, and the automaton of stop strings
tokenizer.py         text to token ids, on threads
client_marks.py      special tokens that a client spells, to ids of text
chat_template.py     conversations to text, in a process that can be killed
tool_prompt.py       tools and calls as chat templates want them
template_worker.py   what that process does; it imports nothing of Pillion

No request and no component is known here.
"""
