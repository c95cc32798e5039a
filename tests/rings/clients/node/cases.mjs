// Runs named cases and prints one JSON object: what each returned, or the error it threw as its SDK typed it.
// The gateway, the key and the model come from the environment; a case's name as argument runs that one alone.

export const { MUSTER_URL, MUSTER_KEY, MUSTER_MODEL } = process.env;

export const PIXEL =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==";

export async function run(cases) {
  const wanted = process.argv[2] ? [process.argv[2]] : Object.keys(cases).filter((name) => name !== "retry");
  const results = {};
  for (const name of wanted) {
    try {
      results[name] = await cases[name]();
    } catch (error) {
      results[name] = describe(error);
    }
  }
  process.stdout.write(JSON.stringify(results));
}

export function describe(error) {
  return {
    error: error.constructor.name,
    status: error.status ?? error.statusCode ?? null,
    type: error.type ?? null,
    code: error.code ?? null,
    message: String(error.message),
    request_id: error.requestID ?? null,
  };
}
