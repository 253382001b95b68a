"""Which tokens run in the next step, and which sequence owns which slot.

Open first: scheduler.py, the one class that the step loop calls.

    scheduler.py      events in, plans of steps and outcomes out; preemption
    step_plan.py      the plan of a step and the outcome of what happened
    sequence.py       one stream or prefill range: its states and tokens;  block_chain.py has its blocks
    queues.py         running, preempted, waiting; the order of service, tenants' shares, and the victim
    step_model.py     what a step costs, as one formula; also used by planners
    step_cost.py      how long a step takes, and the token budget that follows from a target
    block_manager.py  the slots leased to this worker, with free ones for decodes; orders for its KV node
    in_flight.py      steps that were launched and have not ended, and what waits for them
    parallel_samples.py  further answers to one prompt
    grammars.py       what answers' grammars allow
    adapter_slots.py  adapters that are ready or loading, and who may run with them
    partial_blocks.py the last blocks of answers, for next turns
    states.py         states of hybrid models;  state_places.py: where they are kept
    draft_tokens.py   tokens that are proposed and judged in one step

Everything here is sans-IO (I9): the event loop and the RPCs are in pillion.engine.worker, the device in
pillion.engine.backends.
"""
