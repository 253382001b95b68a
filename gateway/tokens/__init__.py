"""From text to token ids and back. Open answer_text.py first.

answer_text.py       sampled tokens to visible text: detokenizer, stop ids and stop strings
stops.py             where a stop string is found
detokenizer.py       token ids to text, token by token
tokenizer.py         text to token ids, on threads
chat_template.py     conversations to text, in a process that can be killed
template_worker.py   that process; it imports nothing of Pillion

No request and no component is known here.
"""
