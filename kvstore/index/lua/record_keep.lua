-- Keeps a bundle of the recorder; the oldest ones go where it has no room, and those that are too old.
-- KEYS: the hash of bundles by id, with the bytes of all under ''; the zset of 'ID BYTES', scored by the time in ms.
-- ARGV: id, bundle, most bytes of all, ms for which they are kept, most bundles that one call removes.
-- Returns 1; 0 where more have to go first: the caller calls again, and Redis serves others in between.
own(KEYS[1], 'hash')
own(KEYS[2], 'zset')
if redis.call('EXISTS', KEYS[1], KEYS[2]) < 2 then
  -- Redis may have evicted one of them, and neither is of use alone.
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
