-- Put before the registry's scripts. KEYS: parts, expiry, numbers, nodes.
local parts, expiry, numbers, nodes = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local function forget(part)
  redis.call('ZREM', expiry, part)
  redis.call('HDEL', parts, part)
  redis.call('HDEL', nodes, part)
end

local function own_registry()
  own(parts, 'hash')
  own(expiry, 'zset')
  own(numbers, 'hash')
  own(nodes, 'hash')
end
