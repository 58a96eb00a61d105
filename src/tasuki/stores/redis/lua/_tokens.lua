-- Who may come in, and the audit of who said so.

local tokens = {}

function tokens.audit(actor, action, target, detail)
  write('LPUSH', key.audit, cmsgpack.pack({ now.text, actor, action, target, detail }))
end
