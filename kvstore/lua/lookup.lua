-- Longest prefix per live node. ARGV: the chain's fields, 16 bytes each, in order.
-- A node that has a block has all blocks before it, so each node's end is found by bisection; values already read are
-- kept, and nodes without the first block are not asked about at all. Holes make the answer a hint, no more (I3).
-- Returns node id, blocks, node id, blocks...
local fields, values = ARGV[1], {}
local function value_at(i)
  if values[i] == nil then
    local field = string.sub(fields, (i - 1) * FIELD + 1, i * FIELD)
    values[i] = redis.call('HGET', bucket_of(field), field) or ''
  end
  return values[i]
end

local function has(i, wanted)
  local value = value_at(i)
  for at = 1, #value, ENTRY do
    if string.sub(value, at, at + ENTRY - 1) == wanted then
      return true
    end
  end
  return false
end

local count, first, answer = #fields / FIELD, value_at(1), {}
if first == '' then
  return answer
end
local live = live_nodes()
for at = 1, #first, ENTRY do
  local entry = string.sub(first, at, at + ENTRY - 1)
  if live[entry] then
    local low, high = 1, count
    while low < high do
      local middle = math.floor((low + high + 1) / 2)
      if has(middle, entry) then
        low = middle
      else
        high = middle - 1
      end
    end
    answer[#answer + 1] = live[entry]
    answer[#answer + 1] = low
  end
end
return answer
