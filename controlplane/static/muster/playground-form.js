// The form of the playground: what it asks for, which fields a surface has a use for, and what is wrong with one.
import { readTurns } from "./playground-turns.js";

const words = JSON.parse(document.getElementById("pg-words").textContent);

// Says a sentence in the language of the page; ``playground.views`` has them all. {name} stands for a value.
export const say = (text, values = {}) =>
    Object.entries(values).reduce((said, [name, value]) => said.replaceAll(`{${name}}`, String(value)), words[text] ?? text);

export const form = document.getElementById("pg-form");
const find = (name) => document.getElementById(`pg-${name}`);

const textFields = [
    "tenant", "key", "system", "prompt", "tools", "schema", "temperature", "max_tokens",
    "prefer_gpu", "max_latency_ms", "fallback_models", "priority",
];
const exampleTools = [
    {
        name: "get_weather",
        description: "The weather in a city, now",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
];
let image = null;

const hasParts = () => form.querySelector("[name=surface]:checked").dataset.parts !== undefined;
const isOtherModel = () => find("model").selectedOptions[0]?.dataset.other !== undefined;

// Returns the fields as the control plane reads them. Not whole: without what code never shows, the key and the picture.
export const readForm = ({ isWhole }) => {
    const fields = Object.fromEntries(textFields.map((name) => [name, form.elements[name]?.value ?? ""]));
    return {
        ...fields,
        key: isWhole ? fields.key : "",
        surface: form.elements.surface.value,
        model: isOtherModel() ? find("other").value : find("model").value,
        turns: hasParts() ? readTurns() : [],
        stream: form.elements.stream.checked,
        ticket: form.elements.ticket.checked,
        image: image && { ...image, data: isWhole ? image.data : "" },
    };
};

export const post = (url, fields, signal) =>
    fetch(url, {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value },
        body: JSON.stringify(fields),
        signal,
    });

// Shows what the surface and the tenant have a use for.
export const showFields = () => {
    const surface = form.querySelector("[name=surface]:checked");
    for (const part of form.querySelectorAll("[data-for]")) {
        part.hidden = surface.dataset[part.dataset.for] === undefined;
    }
    find("path").textContent = `POST ${surface.dataset.path}`;
    const tenant = form.elements.tenant?.value;
    for (const option of find("model").querySelectorAll("option[data-tenant]")) {
        option.hidden = tenant !== undefined && option.dataset.tenant !== "" && option.dataset.tenant !== tenant;
        option.disabled = option.hidden;
    }
    if (find("model").selectedOptions[0]?.disabled) {
        find("model").selectedIndex = [...find("model").options].findIndex((option) => !option.disabled);
    }
    find("other").hidden = !isOtherModel();
};

// Says what is wrong with a field, beside it. Returns whether the form has that field and shows it.
export const blameField = (param, message, { isFocused }) => {
    const name = (param ?? "").split(".").pop().replace(/\[.*/, "").replaceAll("_", "-");
    const place = find(`${name}-error`);
    const control = name === "model" && isOtherModel() ? find("other") : find(name);
    if (!place || !control || control.closest("[hidden]")) {
        return false;
    }
    control.closest("details")?.setAttribute("open", "");
    place.textContent = message;
    place.hidden = false;
    control.setAttribute("aria-invalid", "true");
    control.dataset.describedBy ??= control.getAttribute("aria-describedby") ?? "";
    control.setAttribute("aria-describedby", `${place.id} ${control.dataset.describedBy}`.trim());
    if (isFocused) {
        control.focus();
    }
    return true;
};

export const clearBlame = () => {
    for (const place of form.querySelectorAll(".pg-error")) {
        place.hidden = true;
    }
    for (const control of form.querySelectorAll("[aria-invalid]")) {
        control.removeAttribute("aria-invalid");
        if (control.dataset.describedBy === "") {
            control.removeAttribute("aria-describedby");
        } else {
            control.setAttribute("aria-describedby", control.dataset.describedBy);
        }
    }
};

const changed = () => form.dispatchEvent(new Event("change"));

const dropImage = () => {
    image = null;
    find("image").value = "";
    find("image-shown").hidden = true;
    changed();
};

const readUrl = (file) =>
    new Promise((resolve) => {
        const reader = new FileReader();
        reader.addEventListener("loadend", () => resolve(String(reader.result ?? "")));
        reader.readAsDataURL(file);
    });

const takeImage = async (maxBytes) => {
    const file = find("image").files[0];
    clearBlame();
    if (!file || file.size > maxBytes) {
        dropImage();
        if (file) {
            blameField("image", say("This image is too large. Make it smaller and choose it again."), { isFocused: true });
        }
        return;
    }
    const url = await readUrl(file);
    image = { name: file.name, type: file.type, data: url.slice(url.indexOf(",") + 1) };
    find("image-preview").src = url;
    find("image-shown").hidden = false;
    changed();
};

export const watchForm = (maxImageBytes) => {
    form.addEventListener("change", showFields);
    // The admin's skin would look for a text field beside every file field, and fail.
    find("image").hasChangeListener = true;
    find("image").addEventListener("change", () => takeImage(maxImageBytes));
    find("image-drop").addEventListener("click", () => {
        dropImage();
        find("image").focus();
    });
    find("tools-example").addEventListener("click", () => {
        find("tools").value = JSON.stringify(exampleTools, null, 2);
        find("tools").focus();
        find("tools").setSelectionRange(0, 0);
        find("tools").scrollTop = 0;
        changed();
    });
};
