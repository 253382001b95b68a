-- Removes a component at once. ARGV: component id.
own_registry()
forget(ARGV[1])
return 1
