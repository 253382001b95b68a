-- Shares small values by name: of two values of a name, the one with the later stamp stays, of those with one stamp the greater
-- one. KEYS: the names. ARGV: the version
-- that the caller knows, the most names, the age in ms at which an empty value is forgotten; then name, stamp in ms, value of
-- each that the caller brings. Returns the version, and if it is another one than the caller's all names and values, each value
-- behind its stamp and a space.
local names = KEYS[1]
own(names, 'hash')
local version = redis.call('HGET', names, '')
local changed = not version
for at = 4, #ARGV, 3 do
  local name, stamp, value = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local old = redis.call('HGET', names, name)
  local before, value_before = string.match(old or '', '^(%d+) (.*)$')
  before = tonumber(before)
  local newer = not before or before < tonumber(stamp) or (before == tonumber(stamp) and value_before < value)
  local fits = old or redis.call('HLEN', names) <= tonumber(ARGV[2])
  if fits and newer then
    redis.call('HSET', names, name, stamp .. ' ' .. value)
    changed = true
  end
end
if changed then
  local rows, forgotten = redis.call('HGETALL', names), now_ms() - tonumber(ARGV[3])
  for at = 1, #rows, 2 do
    local stamp = string.match(rows[at + 1], '^(%d+) $')
    if rows[at] ~= '' and stamp and tonumber(stamp) < forgotten then
      redis.call('HDEL', names, rows[at])
    end
  end
  -- A Redis that was emptied begins again, so that the count alone could come back.
  version = now_ms() .. '-' .. (tonumber(version and string.match(version, '%d+$')) or 0) + 1
  redis.call('HSET', names, '', version)
end
if version == ARGV[1] then
  return {version}
end
local answer = {version}
local rows = redis.call('HGETALL', names)
for at = 1, #rows, 2 do
  if rows[at] ~= '' then
    answer[#answer + 1] = rows[at]
    answer[#answer + 1] = rows[at + 1]
  end
end
return answer
