-- A part's heartbeat.
-- ARGV: part id, record, ttl in ms, a fresh generation, boot epoch (4 bytes; '' if the part is no KV node).
-- Returns generation, whether the part was known until now (1 or 0), its node number (4 bytes, or '').
local part, record, ttl, fresh, epoch = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
redis.call('SET', prefix .. 'generation', fresh, 'NX')
drop_expired()
local known = redis.call('ZADD', prefix .. 'expiry', now + ttl, part) == 0 and 1 or 0
redis.call('HSET', prefix .. 'parts', part, now .. ' ' .. record)
local number = ''
if epoch ~= '' then
  number = redis.call('HGET', prefix .. 'numbers', part)
  if not number then
    number = struct.pack('>I4', redis.call('HLEN', prefix .. 'numbers') + 1)
    redis.call('HSET', prefix .. 'numbers', part, number)
  end
  redis.call('HSET', prefix .. 'nodes', part, number .. epoch .. (now + ttl))
end
return {redis.call('GET', prefix .. 'generation'), known, number}
