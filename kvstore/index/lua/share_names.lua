-- Shares small values by name: the later stamp wins, on a tie the greater value, byte by byte. Beyond the max number of
-- names, those emptied first make room for new values.
-- KEYS: the names. ARGV: the caller's version, max names, the age in ms at which an empty value is forgotten; then
-- name, stamp in ms, value of each that the caller brings. Returns the version and, if it differs from the caller's,
-- all names and values, each value after its stamp and a space.
local function less(one, other)
  -- The operator < on strings depends on the server's locale.
  for at = 1, math.min(#one, #other) do
    local here, there = string.byte(one, at), string.byte(other, at)
    if here ~= there then
      return here < there
    end
  end
  return #one < #other
end
local function make_room(names)
  local rows, oldest, since = redis.call('HGETALL', names), nil, nil
  for at = 1, #rows, 2 do
    local stamp = tonumber(rows[at] ~= '' and string.match(rows[at + 1], '^(%d+) $') or nil)
    if stamp and (not since or stamp < since) then
      oldest, since = rows[at], stamp
    end
  end
  return oldest and redis.call('HDEL', names, oldest) == 1
end
local names = KEYS[1]
own(names, 'hash')
local version = redis.call('HGET', names, '')
local changed = not version
for at = 4, #ARGV, 3 do
  local name, stamp, value = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local old = redis.call('HGET', names, name)
  local before, value_before = string.match(old or '', '^(%d+) (.*)$')
  before = tonumber(before)
  local newer = not before or before < tonumber(stamp) or (before == tonumber(stamp) and less(value_before, value))
  local count = redis.call('HLEN', names) - redis.call('HEXISTS', names, '')
  local fits = old or count < tonumber(ARGV[2]) or (value ~= '' and make_room(names))
  if newer and fits then
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
  -- The time makes versions unique: after Redis was emptied, the count restarts.
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
