-- fail(what _reports.lua reads) -> for each {recorded, repeated, fenced or blob_missing; state or false; reason}
-- {app}:job|status|incidents|outcome|retry_count:{id}; then its queue or {app}:delay, or, without a retry, {app}:dlq and
-- {app}:ended; gone are {app}:lease:{id} and its entry in {app}:lease:index.

verbs.fail = function()
  return reports.record_all(function(job, report)
    local verdict = rules.after_failure(job.state, job, jobs.facts(job), report.error_code, report.permanent == '1', report.what)
    local changes = { said = report.said, started_at = job.started_at or given(report.started_at) }
    attempts.settle(job, verdict, report.ended, changes)
    return verdict.reason
  end, true)
end
