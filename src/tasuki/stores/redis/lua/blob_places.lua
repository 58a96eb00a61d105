-- blob_places(count, sha256, …) -> for each {size_bytes, generation} or false
-- Reads {app}:blob:{sha256}.

reads.blob_places = function()
  local answers = {}
  for i, sha256 in ipairs(take_list()) do
    local row = redis.call('HMGET', of('blob', sha256), 'size_bytes', 'generation', 'stored')
    answers[i] = row[3] == '1' and { row[1], row[2] }
  end
  return answers
end
