-- Registers a component until its time to live is over.
-- ARGV: component id, record, ttl in ms, boot epoch (4 bytes; '' if it is no KV node), max lost components to remove.
-- Returns whether the component was known (1 or 0), and its node number (4 bytes, or '').
local component, record, ttl, epoch, limit = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local now = now_ms()
local lost = string.format('%.0f', now + ttl)
own_registry()
local judged = judged_at(now)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', expiry, '-inf', judged, 'LIMIT', 0, limit)) do
  forget(gone)
end
if judged < now then
  -- Redis accepts writes again: renew the ttl of every component that was alive when it stopped.
  for _, silent in ipairs(live_after(judged)) do
    redis.call('ZADD', expiry, 'GT', lost, silent)
    local node = redis.call('HGET', nodes, silent)
    if node then
      redis.call('HSET', nodes, silent, string.sub(node, 1, ENTRY) .. lost)
    end
  end
end
local known = redis.call('ZADD', expiry, lost, component) == 0 and 1 or 0
redis.call('HSET', components, component, string.format('%.0f ', now) .. record)
local newest = string.match(redis.call('HGET', components, NEWEST) or '', '^%d+')
if not newest or tonumber(newest) <= now + ttl then
  redis.call('HSET', components, NEWEST, lost .. ' ' .. string.format('%.0f', ttl))
end
local number = ''
if epoch ~= '' then
  number = redis.call('HGET', numbers, component)
  if not number or #number ~= 4 then
    number = struct.pack('>I4', redis.call('HLEN', numbers) + 1)
    redis.call('HSET', numbers, component, number)
  end
  redis.call('HSET', nodes, component, number .. epoch .. lost)
end
return {known, number}
