// The @anthropic-ai/sdk package: Messages, whole and streamed, tokens, models and typed errors.
import Anthropic from "@anthropic-ai/sdk";
import { MUSTER_KEY, MUSTER_MODEL as model, MUSTER_URL, PIXEL, run } from "./cases.mjs";

const client = new Anthropic({ baseURL: MUSTER_URL, apiKey: MUSTER_KEY, maxRetries: 0, timeout: 20_000 });
const user = (content) => [{ role: "user", content }];
const tools = ["get_weather", "get_time"].map((name) => ({ name, input_schema: { type: "object" } }));
const asked = { model, max_tokens: 64 };
const text = (message) => message.content.filter((block) => block.type === "text").map((block) => block.text).join("");

await run({
  models: async () => {
    const ids = [];
    for await (const found of client.models.list()) ids.push(found.id);
    return { listed: ids.includes(model), retrieved: (await client.models.retrieve(model)).type };
  },
  message: async () => {
    const message = await client.messages.create({ ...asked, system: "Be brief.", messages: user("hi") });
    return { text: text(message), stop_reason: message.stop_reason, ...counts(message) };
  },
  stream: async () => {
    const stream = client.messages.stream({ ...asked, messages: user("hi [[thinking]]") });
    let deltas = "";
    stream.on("text", (piece) => (deltas += piece));
    const message = await stream.finalMessage();
    return { deltas, blocks: message.content.map((block) => block.type), stop_reason: message.stop_reason, ...counts(message) };
  },
  tools: async () => {
    const messages = user("weather? [[parallel_tools]]");
    const message = await client.messages.stream({ ...asked, tools, messages }).finalMessage();
    const calls = message.content.filter((block) => block.type === "tool_use");
    const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: "12 °C" }));
    const turns = [...messages, { role: "assistant", content: message.content }, { role: "user", content: results }];
    const after = await client.messages.create({ ...asked, tools, messages: turns });
    return {
      calls: calls.map((call) => [call.id, call.name, call.input]),
      stop_reason: message.stop_reason,
      text: text(after),
    };
  },
  image: async () => {
    const source = { type: "base64", media_type: "image/png", data: PIXEL };
    const content = [{ type: "image", source }, { type: "text", text: "What is it? [[echo]]" }];
    return { arrived: text(await client.messages.create({ ...asked, messages: user(content) })).includes(PIXEL) };
  },
  tokens: async () => {
    const short = await client.messages.countTokens({ model, messages: user("hi") });
    const long = await client.messages.countTokens({ model, messages: user("hi"), system: "Be brief. ".repeat(50), tools });
    return { counted: short.input_tokens > 0, grows: long.input_tokens > short.input_tokens };
  },
  wrong_key: () => client.withOptions({ apiKey: "mst_wrong" }).messages.create({ ...asked, messages: user("hi") }),
  unknown_model: () => client.messages.create({ ...asked, model: "unheard-of", messages: user("hi") }),
  too_long: () => client.messages.create({ ...asked, messages: user("hi [[error_400_context]]") }),
  busy: () => client.messages.create({ ...asked, messages: user("hi [[error_429]]") }),
  failing: () => client.messages.create({ ...asked, messages: user("hi [[error_500]]") }),
  cut: () => client.messages.stream({ ...asked, messages: user("hi [[cut]]") }).finalMessage(),
  retry: async () => {
    const patient = client.withOptions({ maxRetries: 1 });
    return { text: text(await patient.messages.create({ ...asked, messages: user("hi") })) };
  },
});

function counts(message) {
  return { input_tokens: message.usage.input_tokens, output_tokens: message.usage.output_tokens };
}
