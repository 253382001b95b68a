-- Prefixed to the registry's scripts. KEYS: components, expiry, numbers, nodes.
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

-- A field of `components` that is no component: the time in ms at which the newest heartbeat counts as lost, and its ttl.
local NEWEST = ''

-- Returns the time by which silence is judged. It stops at the newest heartbeat once half of its ttl is over: if no
-- heartbeat arrives, Redis accepts none (a read-only replica, out of memory, a bad disk), and silence proves nothing.
local function judged_at(now)
  local lost, ttl = string.match(redis.call('HGET', components, NEWEST) or '', '^(%d+) (%d+)$')
  if lost and now > lost - ttl / 2 then
    return lost - ttl
  end
  return now
end

local function live_after(time)
  return redis.call('ZRANGEBYSCORE', expiry, '(' .. string.format('%.0f', time), '+inf')
end
