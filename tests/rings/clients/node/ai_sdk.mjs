// The Vercel AI SDK with its providers for chat completions, Messages and Responses: text, usage, and a tool loop to its end.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { MUSTER_KEY as apiKey, MUSTER_MODEL, MUSTER_URL, run } from "./cases.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const baseURL = `${MUSTER_URL}/v1`;
const providers = {
  chat: createOpenAICompatible({ name: "muster", baseURL, apiKey, includeUsage: true }),
  messages: createAnthropic({ baseURL, apiKey }),
  responses: createOpenAI({ baseURL, apiKey }),
};
// Nothing is stored here, and this provider refers to stored items unless it is told so.
const providerOptions = { openai: { store: false } };
const tools = {
  get_weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string(), unit: z.string() }),
    execute: ({ city }) => `12 °C in ${city}`,
  }),
};

async function speak(name, prompt, more) {
  let failure;
  const onError = ({ error }) => (failure = error);
  const model = providers[name](MUSTER_MODEL);
  const answer = streamText({ model, prompt, providerOptions, maxRetries: 0, maxOutputTokens: 64, onError, ...more });
  let text = "";
  for await (const piece of answer.textStream) text += piece;
  if (failure) throw failure;
  return { text, answer };
}

async function plain(name) {
  const { text, answer } = await speak(name, "hi", {});
  const { inputTokens, outputTokens } = await answer.usage;
  return { text, finish_reason: await answer.finishReason, inputTokens, outputTokens };
}

async function looped(name) {
  const { text, answer } = await speak(name, "weather? [[tools]]", { tools, stopWhen: stepCountIs(3) });
  const steps = await answer.steps;
  return { text, calls: steps.flatMap((step) => step.toolCalls.map((call) => [call.toolCallId, call.toolName, call.input])) };
}

await run({
  chat: () => plain("chat"),
  chat_tools: () => looped("chat"),
  chat_busy: () => speak("chat", "hi [[error_429]]", {}),
  messages: () => plain("messages"),
  messages_tools: () => looped("messages"),
  messages_busy: () => speak("messages", "hi [[error_429]]", {}),
  responses: () => plain("responses"),
  responses_tools: () => looped("responses"),
  responses_busy: () => speak("responses", "hi [[error_429]]", {}),
});
