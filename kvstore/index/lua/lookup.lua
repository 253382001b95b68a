-- Finds the longest prefix of (a part of) a chain per entry. KEYS: the bucket of each segment of the part.
-- ARGV: the part's fields, packed; blocks per segment; max entries to return.
-- A node with a block has all blocks before it. So bisection finds the deepest block of any node, and then, for each
-- entry met on the way, how far it reaches. Values are cached. A hole makes the hint too long, no more (I3).
-- Returns entry, blocks, entry, blocks...; nothing if no node has the first block.
local fields, per, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local values, read = {}, {}

-- Returns the entries at block i, packed.
local function at(i)
  local value = values[i]
  if not value then
    local field = string.sub(fields, (i - 1) * FIELD + 1, i * FIELD)
    value = redis.pcall('HGET', KEYS[math.floor((i - 1) / per) + 1], field)
    if type(value) ~= 'string' then
      value = ''
    end
    values[i] = value
    read[#read + 1] = i
  end
  return value
end

local function anybody(value)
  return #value >= ENTRY
end

-- Returns the greatest i in low .. high that `good` accepts; `low` must be good.
local function last(low, high, good, entry)
  while low < high do
    local middle = math.floor((low + high + 1) / 2)
    if good(at(middle), entry) then
      low = middle
    else
      high = middle - 1
    end
  end
  return low
end

local function has(value, entry)
  local place = string.find(value, entry, 1, true)
  while place and place % ENTRY ~= 1 do
    place = string.find(value, entry, place + 1, true)
  end
  return place
end

if not anybody(at(1)) then
  return {}
end
local deepest = last(1, #fields / FIELD, anybody)
table.sort(read, function(a, b) return a > b end)
local seen, answer = {}, {}
for place = 1, #read do
  local i = read[place]
  for _, entry in ipairs(pieces(values[i], ENTRY)) do
    if not seen[entry] and #answer < 2 * limit then
      seen[entry] = true
      answer[#answer + 1] = entry
      answer[#answer + 1] = last(i, deepest, has, entry)
    end
  end
end
return answer
