-- Stores a bundle of the recorder, evicting expired ones and the oldest ones for space.
-- KEYS: the hash of bundles by id, with the total bytes under ''; the zset of 'ID BYTES', scored by the time in ms.
-- ARGV: id, bundle, max total bytes, lifetime in ms, max bundles to remove per call.
-- Returns 1; 0 if more must be removed first: the caller calls again, so that Redis serves others in between.
own(KEYS[1], 'hash')
own(KEYS[2], 'zset')
if redis.call('EXISTS', KEYS[1], KEYS[2]) < 2 then
  -- Redis may have evicted one of them, and neither is useful alone.
  redis.call('DEL', KEYS[1], KEYS[2])
end
local now, size = now_ms(), #ARGV[2]
local total = tonumber(redis.call('HGET', KEYS[1], '') or 0)
for _ = 0, tonumber(ARGV[5]) do
  local oldest = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if not oldest[1] or (total + size <= tonumber(ARGV[3]) and tonumber(oldest[2]) >= now - ARGV[4]) then
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[2], '', string.format('%.0f', total + size))
    redis.call('ZADD', KEYS[2], now, ARGV[1] .. ' ' .. size)
    redis.call('PEXPIRE', KEYS[1], ARGV[4])
    redis.call('PEXPIRE', KEYS[2], ARGV[4])
    return 1
  end
  local id, bytes = string.match(oldest[1], '^(%S+) (%d+)$')
  total = total - bytes
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], oldest[1])
  redis.call('HSET', KEYS[1], '', string.format('%.0f', total))
end
return 0
