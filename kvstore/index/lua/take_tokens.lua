-- Takes from token buckets. KEYS: the hash of one owner's buckets.
-- ARGV, per bucket: capacity and refill per minute (0: no such bucket), amount spent earlier and reported now
-- (negative: returned), amount wanted (-1: nothing).
-- Takes all that is wanted, or nothing if any bucket has too little. More than a bucketful needs a full bucket.
-- Returns the first bucket with too little (0: none) and the time in ms until it has enough.
-- Same arithmetic as gateway/admission/quotas.py: Bucket. A field has the level, the time in ms of that level, the
-- size.
local MINUTE = 60000
local now, fields, longest = now_ms(), {}, 0
own(KEYS[1], 'hash')

local function level_of(number, size)
  local level, at, before = string.match(redis.call('HGET', KEYS[1], number) or '', '^(%S+) (%S+) (%S+)$')
  level, at, before = tonumber(level), tonumber(at), tonumber(before)
  if not (level and at and before) or before <= 0 then
    return size
  end
  level = math.min(before, level + math.max(0, now - at) * before / MINUTE)
  if before ~= size then
    -- The rate changed; the amount spent stays.
    level = size - math.ceil(before - level)
  end
  return level
end

local short, wait, levels = 0, 0, {}
for i = 1, #ARGV / 3 do
  local size, spent, wanted = tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i])
  if size > 0 then
    levels[i] = math.min(size, level_of(i, size) - spent)
    local missing = math.min(wanted, size) - levels[i]
    if short == 0 and wanted >= 0 and missing > 0 then
      short, wait = i, math.ceil(missing * MINUTE / size)
    end
  end
end
for i, level in pairs(levels) do
  local size, wanted = tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i])
  if short == 0 then
    level = level - math.max(0, wanted)
  end
  fields[#fields + 1] = i
  fields[#fields + 1] = string.format('%.17g %.0f %.0f', level, now, size)
  longest = math.max(longest, (size - level) * MINUTE / size)
end
if #fields > 0 then
  redis.call('HSET', KEYS[1], unpack(fields))
  -- A full bucket need not be stored.
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.ceil(longest) + 1000))
end
return {short, wait}
