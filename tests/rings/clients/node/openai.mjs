// The openai package: chat completions and Responses, whole and streamed, with its own helpers.
import OpenAI from "openai";
import { MUSTER_KEY, MUSTER_MODEL as model, MUSTER_URL, PIXEL, run } from "./cases.mjs";

const client = new OpenAI({ baseURL: `${MUSTER_URL}/v1`, apiKey: MUSTER_KEY, maxRetries: 0, timeout: 20_000 });
const user = (content) => [{ role: "user", content }];
const parameters = { type: "object", properties: {}, additionalProperties: true };
const flat = ["get_weather", "get_time"].map((name) => ({ type: "function", name, parameters, strict: false }));

function runnable(name) {
  const answer = (input) => `12 °C for ${JSON.stringify(input)}`;
  return { type: "function", function: { name, description: name, parameters, parse: JSON.parse, function: answer } };
}

async function callTools(script) {
  const tools = [runnable("get_weather"), runnable("get_time")];
  const runner = client.chat.completions.runTools({ model, messages: user(`weather? [[${script}]]`), tools, stream: true });
  const text = await runner.finalContent();
  const calls = runner.messages.flatMap((message) => message.tool_calls ?? []);
  const results = runner.messages.filter((message) => message.role === "tool");
  return { calls: calls.map((call) => [call.id, call.function.name, call.function.arguments]), results: results.length, text };
}

async function respondWithTools(script) {
  const input = user(`weather? [[${script}]]`);
  const asked = { model, tools: [...flat, { type: "web_search" }], store: false };
  const first = await client.responses.stream({ ...asked, input }).finalResponse();
  const calls = first.output.filter((item) => item.type === "function_call");
  const sent = calls.map(({ parsed_arguments, ...call }) => call);
  const results = calls.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: "12 °C" }));
  const after = await client.responses.create({ ...asked, input: [...input, ...sent, ...results] });
  return { calls: calls.map((call) => [call.call_id, call.name, call.arguments]), text: after.output_text };
}

await run({
  models: async () => {
    const ids = [];
    for await (const found of client.models.list()) ids.push(found.id);
    return { listed: ids.includes(model), retrieved: (await client.models.retrieve(model)).id };
  },
  chat: async () => {
    const asked = { model, messages: user("hi"), stream_options: { include_usage: true } };
    const completion = await client.chat.completions.stream(asked).finalChatCompletion();
    const { finish_reason, message } = completion.choices[0];
    return { text: message.content, finish_reason, total_tokens: completion.usage.total_tokens };
  },
  tools: () => callTools("parallel_tools"),
  interleaved: () => callTools("interleaved_tools"),
  image: async () => {
    const content = [
      { type: "image_url", image_url: { url: `data:image/png;base64,${PIXEL}` } },
      { type: "text", text: "What is it? [[echo]]" },
    ];
    const completion = await client.chat.completions.create({ model, messages: user(content) });
    return { arrived: completion.choices[0].message.content.includes(PIXEL) };
  },
  response: async () => {
    const stream = client.responses.stream({ model, input: "hi [[thinking]]", store: false });
    let deltas = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") deltas += event.delta;
    const response = await stream.finalResponse();
    return {
      deltas,
      text: response.output_text,
      status: response.status,
      items: response.output.map((item) => item.type),
      input_tokens: response.usage.input_tokens,
    };
  },
  response_tools: () => respondWithTools("parallel_tools"),
  response_interleaved: () => respondWithTools("interleaved_tools"),
  wrong_key: () => client.withOptions({ apiKey: "mst_wrong" }).chat.completions.create({ model, messages: user("hi") }),
  unknown_model: () => client.chat.completions.create({ model: "unheard-of", messages: user("hi") }),
  too_long: () => client.responses.create({ model, input: "hi [[error_400_context]]", store: false }),
  busy: () => client.chat.completions.create({ model, messages: user("hi [[error_429]]") }),
  failing: () => client.chat.completions.create({ model, messages: user("hi [[error_500]]") }),
  cut: () => client.chat.completions.stream({ model, messages: user("hi [[cut]]") }).finalChatCompletion(),
  retry: async () => {
    const patient = client.withOptions({ maxRetries: 1 });
    return { text: (await patient.chat.completions.create({ model, messages: user("hi") })).choices[0].message.content };
  },
});
