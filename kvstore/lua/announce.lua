-- A node's blocks that came and went. ARGV: entry (8 bytes), fields that came, fields that went (16 bytes each).
-- Entries of the node's earlier boots and of dead nodes are swept out of what is touched. Returns the generation.
local entry, live = ARGV[1], live_nodes()
local number = string.sub(entry, 1, 4)
local function update(fields, added)
  for at = 1, #fields, FIELD do
    local field = string.sub(fields, at, at + FIELD - 1)
    local bucket = bucket_of(field)
    local value = redis.call('HGET', bucket, field) or ''
    store(bucket, field, keep_live(value, live, number) .. added)
  end
end
update(ARGV[2], entry)
update(ARGV[3], '')
return redis.call('GET', prefix .. 'generation') or ''
