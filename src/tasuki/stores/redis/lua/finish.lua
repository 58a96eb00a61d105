-- finish(what _reports.lua reads) -> for each 'recorded', or {repeated, fenced or blob_missing; state or false; reason}
-- {app}:job|status:{id}, {app}:outcome|result|summary|freqs:{id}, {app}:ended, {app}:owners:{sha256}; gone are {app}:lease:{id}
-- and its entry in {app}:lease:index. The TTL of payload, status and results starts. Fenced: {app}:incidents:{id}.

verbs.finish = function()
  return reports.record_all(function(job, report)
    local was = job.state
    if LEASED[was] then
      unrank(key.index, job.id)
    else
      jobs.leave(job)
    end
    if job.shown then
      drop(of('lease', job.id))
    end
    outcomes.write(job, report.ended, job, job.shown and RESULT_TTL_S)
    if job.result_blob then
      job.has_rare = 1
    end
    -- Field by field: this is done for every job, and a table of changes costs as much as all the rest.
    job.state = rules.after(was, 'succeed')
    job.said, job.started_at, job.finished_at = report.said, job.started_at or given(report.started_at), now.text
    job.lease_id, job.incarnation, job.ttl_s, job.delayed = nil, nil, nil, nil
    job.keep, job.reconnect_grace_s, job.expires_at = nil, nil, nil
    rank(key.ended, now.text, job.id)
    jobs.touch(job)
    jobs.recount(job.group, was, job.state)
    jobs.show_status(job, '')
    jobs.expire(job)
  end)
end
