-- Reads the table of KV nodes. Returns the time by which silence is judged, then node id, value of each: entry (8
-- bytes), time in ms at which it counts as lost.
local answer = redis.call('HGETALL', nodes)
table.insert(answer, 1, judged_at(now_ms()))
return answer
