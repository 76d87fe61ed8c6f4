//! `multipleOf`: llguidance counts remainders in 32 bits, and a schema for which these are too few would be followed
//! wrongly.

use serde_json::Value;

/// The most that fits.
const MOST: u128 = u32::MAX as u128;
/// Digits behind the point for which powers of ten fit.
const MOST_DIGITS: u32 = 8;
/// Keywords with schemas for the same value.
const IN_PLACE: [&str; 3] = ["allOf", "anyOf", "oneOf"];

/// # Errors
/// Names the keyword, and the numbers that cannot be followed.
pub(super) fn check(schema: &Value) -> Result<(), String> {
    let (mut all, mut refers) = (Vec::new(), false);
    every(schema, &mut |schema| {
        all.extend(schema["multipleOf"].as_f64());
        refers |= schema.get("$ref").is_some();
    });
    if refers {
        // Any of them may hold beside any other.
        return fits(&all);
    }
    let mut checked = Ok(());
    every(schema, &mut |schema| {
        let mut held = Vec::new();
        of_one_value(schema, &mut held);
        if checked.is_ok() {
            checked = fits(&held);
        }
    });
    checked
}

/// Looks at each object in a schema.
fn every<'a>(value: &'a Value, look: &mut impl FnMut(&'a Value)) {
    match value {
        Value::Array(list) => list.iter().for_each(|value| every(value, look)),
        Value::Object(fields) => {
            look(value);
            fields.values().for_each(|value| every(value, look));
        }
        _ => {}
    }
}

/// The numbers that hold a value together.
fn of_one_value(schema: &Value, held: &mut Vec<f64>) {
    held.extend(schema["multipleOf"].as_f64());
    let lists = IN_PLACE.iter().filter_map(|name| schema[*name].as_array());
    lists.flatten().for_each(|schema| of_one_value(schema, held));
}

/// Whether remainders of what all of them divide fit, and on the way there the product of any two.
fn fits(numbers: &[f64]) -> Result<(), String> {
    let wrong = || {
        let first: Vec<String> = numbers.iter().take(4).map(f64::to_string).collect();
        Err(format!("multipleOf: {} is too large, or has too many digits, to be followed", first.join(" with ")))
    };
    let (mut least, mut digits) = (1, 0);
    // What is no number of the keyword llguidance refuses itself.
    for number in numbers.iter().copied().filter(|number| *number > 0.0) {
        let Some((mut number, more)) = whole(number) else { return wrong() };
        least *= 10u128.pow(more.saturating_sub(digits));
        number *= 10u128.pow(digits.saturating_sub(more));
        digits = digits.max(more);
        least = least / gcd(least, number) * number;
        if least > MOST {
            return wrong();
        }
    }
    let remainders = 10 * least + 9 * 10u128.pow(digits);
    let product = if numbers.len() > 1 { least * least } else { 0 };
    if remainders.max(product) > MOST { wrong() } else { Ok(()) }
}

/// The number without its point, and the digits behind that.
fn whole(mut number: f64) -> Option<(u128, u32)> {
    let mut digits = 0;
    // As llguidance does it: rounding is part of what it finds.
    while number.fract() != 0.0 {
        number *= 10.0;
        digits += 1;
        if digits > MOST_DIGITS {
            return None;
        }
    }
    (number <= MOST as f64).then_some((number as u128, digits))
}

fn gcd(one: u128, other: u128) -> u128 {
    if other == 0 { one } else { gcd(other, one % other) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_and_the_rest_is_not() {
        let each = |one: f64, other: f64| json!({"properties": {"a": {"multipleOf": one}, "b": {"multipleOf": other}}});
        let both = |one: f64, other: f64| json!({"allOf": [{"multipleOf": one}, {"anyOf": [{"multipleOf": other}]}]});
        for (schema, fits) in [
            (json!({"multipleOf": 0.01}), true),
            (json!({"multipleOf": 99_999}), true),
            (json!({"multipleOf": 429_496_729}), false),
            (json!({"multipleOf": 1e-300}), false),
            (json!({"items": {"multipleOf": 1e10}}), false),
            (each(0.01, 1000.0), true),
            (both(0.01, 500.0), true),
            (both(0.01, 1000.0), false),
            (both(99_999.0, 99_999.0), false),
            (json!({"$defs": each(0.01, 1000.0), "$ref": "#/$defs"}), false),
            (json!({"multipleOf": 0}), true),
            (json!({"multipleOf": "x"}), true),
        ] {
            let problem = check(&schema).err();
            assert_eq!(problem.is_none(), fits, "{schema}: {problem:?}");
            assert!(problem.is_none_or(|problem| problem.starts_with("multipleOf: ")), "{schema}");
        }
    }
}
