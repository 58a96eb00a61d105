-- blob_owners(sha256, limit) -> job_ids
-- Reads {app}:owners:{sha256}.

reads.blob_owners = function()
  local sha256, limit = take(2)
  local owners = redis.call('SMEMBERS', of('owners', sha256))
  for i = #owners, tonumber(limit) + 1, -1 do
    owners[i] = nil
  end
  return owners
end
