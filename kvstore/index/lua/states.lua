-- Finds, for each entry, the last place of (a part of) a chain that is followed by a state.
-- KEYS: the bucket of each run of places, in order. ARGV: the fields of the places, packed; max entries to return; the
-- number of places of each run. Returns entry, place, entry, place... with places counted from 1.
local fields, limit = ARGV[1], tonumber(ARGV[2])
local place, seen, answer = #fields / FIELD, {}, {}
for run = #KEYS, 1, -1 do
  local count = tonumber(ARGV[2 + run])
  local wanted = pieces(string.sub(fields, (place - count) * FIELD + 1, place * FIELD), FIELD)
  local values = redis.pcall('HMGET', KEYS[run], unpack(wanted))
  for at = count, 1, -1 do
    local value = values[at]
    for _, entry in ipairs(pieces(type(value) == 'string' and value or '', ENTRY)) do
      if not seen[entry] and #answer < 2 * limit then
        seen[entry] = true
        answer[#answer + 1] = entry
        answer[#answer + 1] = place - count + at
      end
    end
  end
  place = place - count
end
return answer
