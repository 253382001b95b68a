-- Writes the work that a gateway has under way. KEYS: its hash.
-- ARGV: ttl of the hash in ms; 1 if the rest is complete, 0 if it has the changes only; then component and value of
-- each, '' to remove it.
local mine, set, drop = KEYS[1], {}, {}
own(mine, 'hash')
if ARGV[2] == '1' then
  redis.call('DEL', mine)
end
for at = 3, #ARGV, 2 do
  if ARGV[at + 1] == '' then
    drop[#drop + 1] = ARGV[at]
  else
    set[#set + 1] = ARGV[at]
    set[#set + 1] = ARGV[at + 1]
  end
end
if #drop > 0 then
  redis.call('HDEL', mine, unpack(drop))
end
if #set > 0 then
  redis.call('HSET', mine, unpack(set))
end
return redis.call('PEXPIRE', mine, ARGV[1])
