-- forget_blobs(epoch, count, then for each sha256, generation) -> how many
-- Reads {app}:epoch; what is condemned goes from {app}:condemned and {app}:blob:{sha256}.

verbs.forget_blobs = function()
  check_epoch((take(1)))
  local forgotten = 0
  for _ = 1, take_number() do
    local sha256, generation = take(2)
    local name, field = of('blob', sha256), 'condemned:' .. generation
    local member = redis.call('HGET', name, field)
    if member then
      write('HDEL', name, field)
      write('ZREM', key.condemned, member)
      forgotten = forgotten + 1
    end
  end
  return tostring(forgotten)
end
