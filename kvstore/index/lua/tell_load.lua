-- Writes what a gateway has under way. KEYS: its hash.
-- ARGV: the time to live of the hash in ms; 1 where the rest is everything that is under way, 0 where it is what has changed;
-- then component and value of each, '' where nothing is under way there any more.
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
