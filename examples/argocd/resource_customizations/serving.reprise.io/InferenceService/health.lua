-- Health of an InferenceService. Reads the generation and the conditions Ready, Reconciling and Stalled, and no other:
-- the rest inform, and hold nothing up.
local health = { status = "Progressing", message = "Waiting for the operator." }
local status = obj.status
if status == nil or status.conditions == nil then
  return health
end

local conditions = {}
for _, condition in ipairs(status.conditions) do
  conditions[condition.type] = condition
end

local function holds(kind)
  return conditions[kind] ~= nil and conditions[kind].status == "True"
end

local function answer(word, kind)
  health.status = word
  if conditions[kind] ~= nil then
    health.message = (conditions[kind].reason or kind) .. ": " .. (conditions[kind].message or "")
  end
  return health
end

-- A status that is about an older spec says nothing about this one.
if status.observedGeneration ~= nil and status.observedGeneration ~= obj.metadata.generation then
  health.message = "Waiting for the operator to take up the present spec."
  return health
end
if holds("Reconciling") then
  return answer("Progressing", "Reconciling")
end
if holds("Stalled") then
  return answer("Degraded", "Stalled")
end
if holds("Ready") then
  if conditions.Ready.reason == "Suspended" then
    return answer("Suspended", "Ready")
  end
  return answer("Healthy", "Ready")
end
return answer("Progressing", "Ready")
