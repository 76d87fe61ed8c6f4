//! How much a model thinks and how much it says: levels that OpenAI has fields for, and a model knows if its chat
//! template has a variable of that name.

use std::borrow::Cow;

use serde_json::Value;

use super::{Chat, FieldError, RequestError};
use crate::text::{ChatTemplate, TemplateOptions};

/// A level that a client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Level {
    /// The field that asks.
    pub field: &'static str,
    /// Of what.
    pub of: LevelOf,
    /// In OpenAI's words.
    pub value: String,
}

/// What has levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LevelOf {
    /// Thinking before the answer.
    Effort,
    /// The answer's length.
    Verbosity,
}

/// Variables by which templates turn thinking off: Qwen's and DeepSeek's.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];
const NO_THINKING: &str = "none";
/// What models do unasked.
const USUAL_VERBOSITY: &str = "medium";

impl LevelOf {
    /// The template's.
    fn variable(self) -> &'static str {
        match self {
            LevelOf::Effort => "reasoning_effort",
            LevelOf::Verbosity => "verbosity",
        }
    }

    fn values(self) -> &'static [&'static str] {
        match self {
            LevelOf::Effort => &[NO_THINKING, "minimal", "low", "medium", "high", "xhigh", "max"],
            LevelOf::Verbosity => &["low", USUAL_VERBOSITY, "high"],
        }
    }
}

impl Level {
    /// Variables that say so to the template. `thinks`: the model is known to think.
    fn told(
        &self,
        template: &ChatTemplate,
        options: &TemplateOptions,
        thinks: bool,
    ) -> Result<Vec<(&'static str, Value)>, RequestError> {
        let (variable, value, values) = (self.of.variable(), self.value.as_str(), self.of.values());
        if !values.contains(&value) {
            let message = format!("{value:?} is none of {}", values.join(", "));
            return Err(RequestError::field(self.field, FieldError::Value, message));
        }
        let knows = |name: &str| template.reads(name, options);
        let is_off = self.of == LevelOf::Effort && value == NO_THINKING;
        let switches: Vec<_> = SWITCHES.into_iter().filter(|name| is_off && knows(name)).collect();
        if !switches.is_empty() {
            return Ok(switches.into_iter().map(|name| (name, false.into())).collect());
        }
        if knows(variable) {
            return Ok(vec![(variable, value.into())]);
        }
        let asks_for_nothing = match self.of {
            LevelOf::Effort => is_off && !thinks,
            LevelOf::Verbosity => value == USUAL_VERBOSITY,
        };
        if asks_for_nothing {
            return Ok(Vec::new());
        }
        let off = if self.of == LevelOf::Effort && SWITCHES.into_iter().any(knows) {
            format!("; {NO_THINKING:?} turns thinking off")
        } else {
            String::new()
        };
        let message = format!("the model's chat template knows no {variable}; leave the field out{off}");
        Err(RequestError::field(self.field, FieldError::Unsupported, message))
    }
}

/// The options of a chat with what its levels say to the template.
///
/// # Errors
/// Names a level that there is not, or that the template does not know, or that `chat_template_kwargs` contradict.
pub(super) fn options<'a>(
    chat: &'a Chat,
    template: &ChatTemplate,
    thinks: bool,
) -> Result<Cow<'a, TemplateOptions>, RequestError> {
    let mut options = Cow::Borrowed(&chat.options);
    for level in &chat.levels {
        for (name, value) in level.told(template, &chat.options, thinks)? {
            if let Some(given) = options.kwargs.get(name).filter(|given| **given != value) {
                let message = format!("contradicts chat_template_kwargs, whose {name} is {given}; give one of them");
                return Err(RequestError::field(level.field, FieldError::Value, message));
            }
            options.to_mut().kwargs.insert(name.into(), value);
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, "", "").unwrap()
    }

    fn ask(source: &str, of: LevelOf, value: &str, kwargs: Value, thinks: bool) -> Result<Value, &'static str> {
        let options = TemplateOptions { kwargs: kwargs.as_object().unwrap().clone(), ..TemplateOptions::default() };
        let levels = vec![Level { field: "the_field", of, value: value.into() }];
        let chat = Chat { options, levels, ..Chat::default() };
        match super::options(&chat, &template(source), thinks) {
            Ok(options) => Ok(Value::Object(options.kwargs.clone())),
            Err(error) => {
                assert_eq!(error.param(), "the_field");
                Err(error.code())
            }
        }
    }

    #[test]
    fn a_level_is_the_templates_variable_or_refused() {
        use LevelOf::{Effort, Verbosity};
        // As gpt-oss has it: read within a macro, and set where it is not given.
        let levels = "{% macro system() %}{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}\
                      {% endif %}{{ reasoning_effort }}{{ verbosity }}{% endmacro %}{{ system() }}";
        let switch = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}";
        let deepseek = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}";
        let defaulted = "{% set enable_thinking = enable_thinking | default(true) %}{{ enable_thinking }}";
        let both = "{{ enable_thinking }}{{ reasoning_effort }}";
        let plain = "{{ messages[0].thinking }}{% set verbosity = 1 %}{{ verbosity }}";
        let none = || json!({});
        for (source, of, value, thinks, told) in [
            (levels, Effort, "high", true, Ok(json!({"reasoning_effort": "high"}))),
            (levels, Effort, "none", true, Ok(json!({"reasoning_effort": "none"}))),
            (levels, Effort, "highest", true, Err("invalid_value")),
            (levels, Verbosity, "low", true, Ok(json!({"verbosity": "low"}))),
            (levels, Verbosity, "none", true, Err("invalid_value")),
            (switch, Effort, "none", true, Ok(json!({"enable_thinking": false}))),
            (switch, Effort, "low", true, Err("unsupported_parameter")),
            (deepseek, Effort, "none", true, Ok(json!({"thinking": false}))),
            (defaulted, Effort, "none", true, Ok(json!({"enable_thinking": false}))),
            (both, Effort, "none", true, Ok(json!({"enable_thinking": false}))),
            (both, Effort, "max", true, Ok(json!({"reasoning_effort": "max"}))),
            (plain, Effort, "none", false, Ok(none())),
            (plain, Effort, "none", true, Err("unsupported_parameter")),
            (plain, Effort, "low", false, Err("unsupported_parameter")),
            (plain, Verbosity, "medium", false, Ok(none())),
            (plain, Verbosity, "high", false, Err("unsupported_parameter")),
        ] {
            assert_eq!(ask(source, of, value, none(), thinks), told, "{source} {value}");
        }
        for (kwargs, told) in [
            (json!({"enable_thinking": false}), Ok(json!({"enable_thinking": false}))),
            (json!({"enable_thinking": true}), Err("invalid_value")),
            (json!({"other": 1}), Ok(json!({"other": 1, "enable_thinking": false}))),
        ] {
            assert_eq!(ask(switch, Effort, "none", kwargs, true), told);
        }
    }

    #[test]
    fn the_template_for_tools_is_asked_where_there_are_tools() {
        let template = template("x").with_tool_use(template("{{ reasoning_effort }}"));
        assert!(!template.reads("reasoning_effort", &TemplateOptions::default()));
        let tool = crate::text::Tool::Function(crate::text::Function {
            name: "f".into(),
            description: None,
            parameters: None,
            strict: false,
        });
        let options = TemplateOptions { tools: vec![tool], ..TemplateOptions::default() };
        assert!(template.reads("reasoning_effort", &options));
    }
}
