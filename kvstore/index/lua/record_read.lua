-- Reads bundles of the recorder. KEYS: as in record_keep.lua.
-- ARGV: an id: returns its bundle, or ''. Or '', the first and the last place: returns their 'ID BYTES', the newest first.
own(KEYS[1], 'hash')
own(KEYS[2], 'zset')
if ARGV[1] ~= '' then
  return redis.call('HGET', KEYS[1], ARGV[1]) or ''
end
return redis.call('ZREVRANGE', KEYS[2], ARGV[2], ARGV[3])
