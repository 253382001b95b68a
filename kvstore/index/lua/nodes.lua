-- Reads the table of KV nodes. Returns now, then node id, value of each: entry (8 bytes), time in ms at which it counts as lost.
local answer = redis.call('HGETALL', nodes)
table.insert(answer, 1, now_ms())
return answer
