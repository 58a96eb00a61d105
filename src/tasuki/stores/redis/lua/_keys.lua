-- Every key of the store, below the prefix of its app. Those of the first block are a contract with outsiders (the keys, their
-- types and the meaning of their fields); those of the second block are the store's own and may change with it. Status, lease and
-- retry_count, and a TTL, are for jobs of the app's own subject: nobody outside knows of the others, and they would cost a third.
--
--   {app}:queue                 LIST    ready jobs of the app's own subject and default priority: LPUSH in, the oldest is last.
--                                       An outsider's SET {app}:payload:{id} + LPUSH {app}:queue {id} is a job
--   {app}:payload:{id}          STRING  what the job works on; expires with the result. Of jobs of other subjects only a large one,
--                                       others stand in {app}:spec:{id}
--   {app}:status:{id}           HASH    status (queued, running, finished, failed, canceled), detail, updated_at; likewise
--   {app}:lease:{id}            HASH    worker_id, lease_id, expires_at. No TTL
--   {app}:lease:index           ZSET    leased jobs by when their lease may be taken from its worker
--   {app}:retry_count:{id}      STRING  failures + losses; the limits are judged by the two fields of {app}:job:{id}
--   {app}:delay                 ZSET    jobs that wait for promote, by when they may run
--   {app}:dlq                   LIST    dead-lettered jobs, the newest first
--   {app}:result:{id}           STRING  the bytes of the result; its TTL starts when the job ends
--   {app}:summary:{id}, {app}:freqs:{id}  STRING  the parts of the result that have a key of their own
--   {app}:token:{sha256}        HASH    one token
--   {app}:revoked_tokens        SET     sha256 of revoked tokens
--
--   {app}:job:{id}              STRING  everything else that is known of a job (see _jobs.lua); one without it does not exist
--   {app}:spec:{id}             STRING  what of the job never changes: see _jobs.lua
--   {app}:outcome:{id}          STRING  msgpack of the Outcome without what has a key of its own
--   {app}:incidents:{id}        LIST    msgpack of [at, kind, attempt, worker_id, actor, reason], the oldest first
--   {app}:queue:{priority}:{group}:{kind}:{subject}  ZSET  all other ready jobs, by seq
--   {app}:queues:{priority}     HASH    {kind}:{subject} -> group of the queues above that hold a job
--   {app}:served                ZSET    groups by when they were last given a job
--   {app}:jobs                  ZSET    all jobs by seq, which is their order of submission
--   {app}:ended                 ZSET    terminal jobs by finished_at
--   {app}:late                  ZSET    waiting jobs that have a not_after, by it
--   {app}:counts                HASH    {counter}:{group} -> jobs
--   {app}:sequence              HASH    what counts up: job, served, token, blob
--   {app}:epoch                 HASH    epoch, holder, taken_over_at
--   {app}:tokens                ZSET    sha256 of all tokens by order of creation
--   {app}:token_ids             HASH    token_id -> sha256
--   {app}:audit                 LIST    msgpack of [at, actor, action, target, detail], the newest first
--   {app}:blob:{sha256}         HASH    the live generation, and condemned:{generation} for those before it
--   {app}:blobs                 ZSET    live blobs that no job refers to, by when they were touched
--   {app}:condemned             ZSET    condemned blobs by when they were touched
--   {app}:blob_bytes            STRING  what all live blobs take
--   {app}:owners:{sha256}       SET     jobs that refer to the blob
--   {app}:turn:{session}        HASH    number and answers of the last turn of one store object; gone a day after its last turn

local prefix = APP .. ':'

local key = {
  queue = prefix .. 'queue',
  index = prefix .. 'lease:index',
  delay = prefix .. 'delay',
  dlq = prefix .. 'dlq',
  revoked = prefix .. 'revoked_tokens',
  served = prefix .. 'served',
  jobs = prefix .. 'jobs',
  ended = prefix .. 'ended',
  late = prefix .. 'late',
  counts = prefix .. 'counts',
  sequence = prefix .. 'sequence',
  epoch = prefix .. 'epoch',
  tokens = prefix .. 'tokens',
  token_ids = prefix .. 'token_ids',
  audit = prefix .. 'audit',
  blobs = prefix .. 'blobs',
  condemned = prefix .. 'condemned',
  blob_bytes = prefix .. 'blob_bytes',
}

local heads = {}

-- The keys that there are many of, by their kind: of('payload', id).
local function of(kind, name)
  local head = heads[kind]
  if not head then
    head = prefix .. kind .. ':'
    heads[kind] = head
  end
  return head .. name
end
