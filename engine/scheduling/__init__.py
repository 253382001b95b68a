"""Which tokens run in the next step, and which sequence owns which slot.

Open first: scheduler.py, the one class that the step loop calls.

    scheduler.py      events in, plans of steps and outcomes out; preemption
    step_plan.py      the plan of a step and the outcome of what happened
    sequence.py       one stream or span: its states and tokens;  block_chain.py has its blocks
    queues.py         running, preempted, waiting; the order of service and the victim
    step_cost.py      how long a step takes, and the token budget that follows from a target
    block_manager.py  the slots leased to this worker; commits, releases and resumes for its KV node
    slot_stock.py     free slots, from which decodes grow without an RPC
    in_flight.py      steps that were launched and have not ended, and what waits for them
    adapter_places.py adapters that are ready or loading, and who may run with them
    forks.py          further answers to one prompt
    drafts.py         speculative decoding: guesses and how they are scheduled
    draft_control.py  how many tokens are guessed for each stream
    acceptance.py     how often guesses are right
    recent_answers.py where suffix decoding looks up what followed in earlier answers
    draft_chains.py   a draft model's KV: its slots, what it catches up with, its guesses
    eagle_chains.py   the same of an EAGLE-3 head, and the states that it reads
    lookup_drafters.py guesses from the text itself, and from earlier answers

Everything here is sans-IO (I9): pillion.engine.worker has the event loop and the RPCs, pillion.engine.backends the
device.
"""
