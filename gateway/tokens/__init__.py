"""From text to token ids and back. Open answer_text.py first.

answer_text.py       sampled tokens to visible text: detokenizer, stop ids and stop strings
stops.py             stop strings: the automaton of a request, and where one is found in an answer
detokenizer.py       token ids to text, token by token
tokenizer.py         text to token ids, on threads
thread_turns.py      whose job has the next free thread (no I/O)
chat_template.py     conversations to text, in a process that can be killed
template_worker.py   what that process does; it imports nothing of Pillion

No request and no component is known here.
"""
