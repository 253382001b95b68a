-- A part says goodbye. ARGV: part id.
own_registry()
forget(ARGV[1])
return 1
