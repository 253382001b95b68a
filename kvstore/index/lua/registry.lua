-- This file stands before the registry's scripts. KEYS: components, expiry, numbers, nodes.
local components, expiry, numbers, nodes = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local function forget(component)
  redis.call('ZREM', expiry, component)
  redis.call('HDEL', components, component)
  redis.call('HDEL', nodes, component)
end

local function own_registry()
  own(components, 'hash')
  own(expiry, 'zset')
  own(numbers, 'hash')
  own(nodes, 'hash')
end
