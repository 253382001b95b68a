-- A part says goodbye. ARGV: part id.
redis.call('ZREM', prefix .. 'expiry', ARGV[1])
redis.call('HDEL', prefix .. 'parts', ARGV[1])
redis.call('HDEL', prefix .. 'nodes', ARGV[1])
return 1
