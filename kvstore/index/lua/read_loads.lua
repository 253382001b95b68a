-- Sums the work of some gateways. KEYS: their hashes. ARGV: components, one per line.
-- A value is two numbers of four bytes. Returns both sums for each component, packed alike.
local MOST = 2 ^ 32 - 1
local names, amounts, queued = {}, {}, {}
for name in string.gmatch(ARGV[1], '[^\n]+') do
  names[#names + 1], amounts[#names + 1], queued[#names + 1] = name, 0, 0
end
for _, key in ipairs(KEYS) do
  local values = redis.pcall('HMGET', key, unpack(names))
  for i = 1, #names do
    local value = values[i]
    if value and #value == 8 then
      local amount, tokens = struct.unpack('>I4I4', value)
      amounts[i], queued[i] = amounts[i] + amount, queued[i] + tokens
    end
  end
end
local sums = {}
for i = 1, #names do
  sums[i] = struct.pack('>I4I4', math.min(amounts[i], MOST), math.min(queued[i], MOST))
end
return table.concat(sums)
