//! The model's chat template: messages to a prompt, in the environment that Hugging Face gives such templates.

use std::{
    collections::HashSet,
    io,
    time::{SystemTime, UNIX_EPOCH},
};

use minijinja::{
    Environment, Error, ErrorKind, Value, context,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};

use super::{Function, TextError, Tool, ToolCall, time::strftime};

/// Instructions that one rendering may take: a thousand messages need some hundred thousand.
const FUEL: u64 = 5_000_000;
/// Bytes of a prompt of one short message in which a tool is looked for: templates that say much to the model first
/// write some ten thousand.
const MAX_PROBE_BYTES: usize = 1 << 20;
/// Spaces that `tojson(indent=N)` takes.
const MAX_INDENT: usize = 64;
/// Bytes of one `tojson`: with an indent a value takes many times its own. No prompt is as long.
const MAX_JSON_BYTES: usize = 32 << 20;

/// One message of a chat.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ChatMessage {
    /// "system", "user", "assistant" or "tool".
    pub role: String,
    /// Its text.
    pub content: String,
    /// Who speaks, where a template tells speakers of a role apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What the assistant thought before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// What the assistant called. Left out where it called nothing: templates ask whether it is there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Of a tool's answer: the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

impl ChatMessage {
    /// A message that is nothing but its text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), ..Self::default() }
    }
}

/// How a chat becomes a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct TemplateOptions {
    /// The prompt goes on to where the assistant's answer starts.
    pub add_generation_prompt: bool,
    /// What the template knows by names of its own, such as `enable_thinking`.
    pub kwargs: serde_json::Map<String, serde_json::Value>,
    /// What the model may call.
    pub tools: Vec<Tool>,
    /// What it may answer from: objects, of which the template knows the fields.
    pub documents: Vec<serde_json::Map<String, serde_json::Value>>,
}

impl Default for TemplateOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, kwargs: serde_json::Map::new(), tools: Vec::new(), documents: Vec::new() }
    }
}

/// Names that mean the same in all templates.
pub const TEMPLATE_NAMES: [&str; 6] =
    ["messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents"];

/// A parsed chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    /// Names that it reads and does not set before.
    variables: HashSet<String>,
    /// For chats with tools, where the model has one of its own for them.
    tool_use: Option<Box<Self>>,
    bos_token: String,
    eos_token: String,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Parses a template.
    ///
    /// # Errors
    /// In words, with the line: where the template does not parse.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_fuel(Some(FUEL));
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_template_owned(NAME, translate(source)).map_err(|error| format!("{error:#}"))?;
        let to_analyse = with_other_targets(&translate(source));
        let analysed = environment.template_from_str(&to_analyse);
        let variables = analysed.map(|template| template.undeclared_variables(false)).unwrap_or_default();
        Ok(Self {
            variables,
            environment,
            source: source.into(),
            tool_use: None,
            bos_token: bos_token.into(),
            eos_token: eos_token.into(),
        })
    }

    /// Chats with tools have that template.
    pub fn with_tool_use(self, template: Self) -> Self {
        Self { tool_use: Some(template.into()), ..self }
    }

    /// That for a chat with these options.
    fn of(&self, options: &TemplateOptions) -> &Self {
        match &self.tool_use {
            Some(template) if !options.tools.is_empty() => template,
            _ => self,
        }
    }

    /// Whether a chat with these options may say something else if this variable is given.
    pub fn reads(&self, name: &str, options: &TemplateOptions) -> bool {
        self.of(options).variables.contains(name)
    }

    /// The text of the template for chats with tools.
    pub fn source(&self) -> &str {
        self.tool_use.as_ref().map_or(&self.source, |template| &template.source)
    }

    /// Whether it tells the model of tools: the name of one turns up in a prompt. (That a template names the variable
    /// says less: some only ask for it to raise.)
    pub fn takes_tools(&self) -> bool {
        let name = "get_local_time";
        let schema = serde_json::json!({"type": "object", "properties": {}});
        let function = Function {
            name: name.into(),
            description: Some("The time".into()),
            parameters: schema.as_object().cloned(),
            strict: false,
        };
        let options = TemplateOptions { tools: vec![Tool::Function(function)], ..TemplateOptions::default() };
        let prompt = self.render(&[ChatMessage::new("user", "Hi")], &options, MAX_PROBE_BYTES);
        prompt.is_ok_and(|prompt| prompt.contains(name))
    }

    /// The prompt for these messages.
    ///
    /// # Errors
    /// [`TextError::TooLong`] for a prompt of more than `max_bytes`, of which no more is written;
    /// [`TextError::Template`], in the template's own words where it raises.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        options: &TemplateOptions,
        max_bytes: usize,
    ) -> Result<String, TextError> {
        let Self { environment, bos_token, eos_token, .. } = self.of(options);
        let refused = |error: Error| {
            let reason = error.detail().map_or_else(|| error.to_string(), str::to_owned);
            TextError::Template(reason)
        };
        let template = environment.get_template(NAME).map_err(refused)?;
        let context = context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt => options.add_generation_prompt,
            bos_token => bos_token.as_str(),
            eos_token => eos_token.as_str(),
            // Templates ask whether there are any.
            tools => (!options.tools.is_empty()).then(|| Value::from(Serde(&options.tools))),
            documents => (!options.documents.is_empty()).then(|| Value::from(Serde(&options.documents))),
            ..Value::from(Serde(&options.kwargs))
        };
        let mut prompt = Bounded { bytes: Vec::new(), max_bytes, overflowed: false };
        match template.render_captured_to(context, &mut prompt) {
            Ok(_) => Ok(String::from_utf8(prompt.bytes).expect("templates write whole texts")),
            Err(_) if prompt.overflowed => Err(TextError::TooLong { max_bytes }),
            Err(error) => Err(refused(error)),
        }
    }
}

/// Takes so many bytes and refuses more.
struct Bounded {
    bytes: Vec<u8>,
    max_bytes: usize,
    overflowed: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.max_bytes {
            self.overflowed = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What Python's jinja2 understands and minijinja does not, in its words. `{% generation %}` only marks the assistant's
/// text for training: here it is a block that is always taken, which keeps the whitespace control of its tags. A
/// backslash at the end of a line inside a string joins it with the next.
fn translate(source: &str) -> String {
    with_tags(source, |tag| match statement(tag) {
        name @ ("generation" | "endgeneration") => {
            let block = if name == "generation" { "if true" } else { "endif" };
            tag.replacen(name, block, 1)
        }
        _ => tag.replace("\\\n", ""),
    })
}

/// For analysis alone: `{% set x = x | default(1) %}` sets another variable than it reads. What reads it behind that is
/// then taken for a reader of what the client gives, as it is.
fn with_other_targets(source: &str) -> String {
    with_tags(source, |tag| {
        let is_name = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let set = statement(tag).strip_prefix("set ").and_then(|set| set.split_once('='));
        match set.map(|(target, value)| (target.trim(), value)) {
            Some((target, value)) if is_name(target) && value.contains(target) => {
                tag.replacen(&format!("set {target}"), &format!("set _{target}"), 1)
            }
            _ => tag.to_owned(),
        }
    })
}

/// What a tag of a block says, without its ends.
fn statement(tag: &str) -> &str {
    let inner = tag.trim_start_matches("{%").trim_end_matches("%}");
    inner.trim_matches(|c: char| matches!(c, '-' | '+') || c.is_whitespace())
}

/// The text with each of its tags changed.
fn with_tags(source: &str, change: impl Fn(&str) -> String) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    // One look for both kinds: for each alone, a kind that is not there would be looked for to the end at every tag.
    let opens = |rest: &str| rest.as_bytes().windows(2).position(|pair| matches!(pair, b"{%" | b"{{"));
    while let Some(at) = opens(rest) {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let (tag, after) = tag.split_at(tag_len(tag));
        out.push_str(&change(tag));
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Bytes of the tag that `text` starts with; all of it if the tag does not end.
fn tag_len(text: &str) -> usize {
    let end = if text.starts_with("{%") { "%}" } else { "}}" };
    let mut quote = None;
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if c == '"' || c == '\'' => quote = Some(c),
            None if text[at..].starts_with(end) => return at + end.len(),
            None => {}
        }
    }
    text.len()
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// The date and time now, in UTC.
fn strftime_now(format: String) -> Result<String, Error> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(&format, now)
        .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know {format:?}")))
}

/// JSON as Python's `json.dumps(.., ensure_ascii=False)` writes it; minijinja's own filter escapes for HTML.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.assert_all_used()?;
    if ensure_ascii == Some(true) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson(ensure_ascii=true) is not supported"));
    }
    let mut out = Bounded { bytes: Vec::new(), max_bytes: MAX_JSON_BYTES, overflowed: false };
    let written = match indent {
        Some(width) if width > MAX_INDENT => {
            let message = format!("tojson(indent={width}) is more than {MAX_INDENT} spaces");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        Some(width) => {
            let spaces = " ".repeat(width);
            let formatter = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Spaced)),
    };
    if out.overflowed {
        let message = format!("tojson would write more than {MAX_JSON_BYTES} bytes");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    written.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    String::from_utf8(out.bytes).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
}

/// One line, with a space after each comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<String, TextError> {
        let messages = [ChatMessage::new("system", "Be brief."), ChatMessage::new("user", "a<b & 'c' é")];
        ChatTemplate::new(source, "<s>", "</s>").unwrap().render(&messages, &TemplateOptions::default(), usize::MAX)
    }

    #[test]
    fn a_prompt_that_grows_too_long_is_not_written_to_its_end() {
        let template =
            ChatTemplate::new("{% for _ in range(9) %}{{ messages[0].content }}{% endfor %}", "", "").unwrap();
        let messages = [ChatMessage::new("user", "é".repeat(5))];
        assert_eq!(template.render(&messages, &TemplateOptions::default(), 90).unwrap().len(), 90);
        let error = template.render(&messages, &TemplateOptions::default(), 89).unwrap_err();
        assert!(matches!(error, TextError::TooLong { max_bytes: 89 }), "{error}");
    }

    #[test]
    fn blocks_take_their_line_with_them() {
        let source =
            "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }}: {{ m['content'] }}\n  {% endfor %}\nend";
        assert_eq!(render(source).unwrap(), "<s>\nsystem: Be brief.\nuser: a<b & 'c' é\nend");
    }

    #[test]
    fn the_environment_is_hugging_faces() {
        for (source, prompt) in [
            ("{{ messages[1] | tojson }}", r#"{"role": "user", "content": "a<b & 'c' é"}"#),
            ("{{ [1, true, none] | tojson(indent=2) }}", "[\n  1,\n  true,\n  null\n]"),
            ("{{ messages[0].content.upper().startswith('BE') }}", "True"),
            (
                "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}\
                 {{ m.role }}{% break %}{% endfor %}",
                "user",
            ),
            ("{% if tools is none and not (x is defined) and add_generation_prompt %}ok{% endif %}", "ok"),
            (
                "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "2",
            ),
            ("a {%- generation -%} b {%- endgeneration %} c", "ab c"),
            ("{% generation %}\nb\n{% endgeneration %}\nc", "b\nc"),
            ("{{ messages[0].name is defined }}", "False"),
            ("a\\\n{{ 'b\\\nc%}' }}{% set x = '}}\\\n' %}d", "a\\\nbc%}d"),
            ("{{ messages[::-1][0].role }}{{ eos_token }}", "user</s>"),
        ] {
            assert_eq!(render(source).unwrap(), prompt, "{source}");
        }
        assert_eq!(render("{{ strftime_now('%Y') }}").unwrap().len(), 4);
    }

    #[test]
    fn what_a_template_raises_is_said() {
        let error = render("{{ raise_exception('Roles must alternate') }}").unwrap_err().to_string();
        assert!(error.contains("Roles must alternate"), "{error}");
    }

    #[test]
    fn a_template_without_end_runs_out_of_fuel() {
        let source = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
        assert!(render(source).unwrap_err().to_string().contains("fuel"));
    }

    /// Before it was bounded, the probe wrote all of it, as far as fuel lasts.
    #[test]
    fn a_tool_is_looked_for_in_a_bounded_text() {
        let late = |bytes: usize| {
            let source = format!("{{% for _ in range({bytes}) %}}x{{% endfor %}}{{{{ tools[0].function.name }}}}");
            ChatTemplate::new(&source, "", "").unwrap().takes_tools()
        };
        assert!(late(1000));
        let block = format!("{{% for _ in range(40) %}}{}{{% endfor %}}{{{{ tools | tojson }}}}", "x".repeat(30_000));
        assert!(!ChatTemplate::new(&block, "", "").unwrap().takes_tools());
    }

    #[test]
    fn tags_of_one_kind_take_time_in_proportion() {
        let begin = std::time::Instant::now();
        for tag in ["{{ a }}", "{% if a %}", "{ "] {
            let source = tag.repeat(300_000);
            assert_eq!(translate(&source), source);
        }
        // A second in all at most; minutes if every tag looks through all that follows.
        assert!(begin.elapsed().as_secs() < 10, "{:?}", begin.elapsed());
    }

    #[test]
    fn json_in_a_template_is_bounded_in_its_indent_and_in_all() {
        assert!(render("{{ messages | tojson(indent=64) }}").is_ok());
        for width in ["65", "999999999999"] {
            let error = render(&format!("{{{{ messages | tojson(indent={width}) }}}}")).unwrap_err().to_string();
            assert!(error.contains("more than 64 spaces"), "{error}");
        }
        let options = TemplateOptions {
            kwargs: serde_json::json!({"x": "y".repeat(MAX_JSON_BYTES)}).as_object().unwrap().clone(),
            ..TemplateOptions::default()
        };
        let template = ChatTemplate::new("{{ x | tojson }}", "", "").unwrap();
        let error = template.render(&[ChatMessage::new("user", "Hi")], &options, usize::MAX).unwrap_err().to_string();
        assert!(error.contains("tojson would write more"), "{error}");
    }

    #[test]
    fn a_template_that_does_not_parse_is_refused_at_load() {
        assert!(ChatTemplate::new("{% if %}", "", "").is_err());
        assert!(ChatTemplate::new("{% generation", "", "").is_err());
    }
}
