"""What prefill and decode workers share: the scheduler, the step loop, the models and their backends."""
