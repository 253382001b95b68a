"""Which tokens run in the next step, and which sequence owns which slot.

Open first: scheduler.py, the one class that the step loop calls.

    scheduler.py      events in, plans of steps and outcomes out; preemption
    step_plan.py      the plan of a step, and the outcome: updates and orders since the last one
    sequence.py       one stream or prefill range: its states and tokens;  block_chain.py: its blocks
    queues.py         running, preempted and waiting sequences: order of service, tenants' shares, preemption victim
    step_model.py     cost of a step as one formula; also used by planners
    step_cost.py      the fit of that formula to measured steps, and the token budget that meets a target
    block_manager.py  slots leased to this worker, free ones included; orders for its KV node
    in_flight.py      launched steps, and the memory orders that wait for their end
    parallel_samples.py  further answers to one prompt
    grammars.py       forced tokens and finished answers, by the answers' grammars
    adapter_slots.py  adapters that are ready or loading, and the sequences that may run with them
    partial_blocks.py last, partial blocks of answers, copied by the next turns of conversations
    states.py         recurrent states of hybrid models;  state_positions.py: where they are kept
    draft_tokens.py   draft tokens of a step: proposed, verified, probed

Everything here is sans-IO (I9): the event loop and the RPCs are in pillion.engine.worker, the device in
pillion.engine.backends.
"""
