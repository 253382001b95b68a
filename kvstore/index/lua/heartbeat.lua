-- Registers a component until its time to live is over.
-- ARGV: component id, record, ttl in ms, boot epoch (4 bytes; '' if it is no KV node), lost components to remove at most.
-- Returns whether the component was known until now (1 or 0), and its node number (4 bytes, or '').
local component, record, ttl, epoch, limit = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local now = now_ms()
own_registry()
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', expiry, '-inf', now, 'LIMIT', 0, limit)) do
  forget(gone)
end
local known = redis.call('ZADD', expiry, now + ttl, component) == 0 and 1 or 0
redis.call('HSET', components, component, string.format('%.0f ', now) .. record)
local number = ''
if epoch ~= '' then
  number = redis.call('HGET', numbers, component)
  if not number or #number ~= 4 then
    number = struct.pack('>I4', redis.call('HLEN', numbers) + 1)
    redis.call('HSET', numbers, component, number)
  end
  redis.call('HSET', nodes, component, number .. epoch .. string.format('%.0f', now + ttl))
end
return {known, number}
